"""Adapters for training frameworks, a module each. None is imported by the package itself."""
