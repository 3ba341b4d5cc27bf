"""Typed configurations, and what they build: model, loss and data, handed to the engine."""
