"""Heads and losses with very many classes: in blocks, and divided among processes."""
