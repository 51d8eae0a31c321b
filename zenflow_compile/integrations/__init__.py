"""Adapters for training frameworks, one module each."""
