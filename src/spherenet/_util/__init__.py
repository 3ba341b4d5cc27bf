"""Argument checks, messages, files and caches: nothing about spheres."""
