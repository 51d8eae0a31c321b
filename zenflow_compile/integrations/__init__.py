"""Adapters for training frameworks: one module for each, which imports that framework at its top."""
