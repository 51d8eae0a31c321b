"""What other training frameworks need besides the optimizer: one module for each, which imports that framework."""
