"""C++ that workers run without the GIL, with no header of PyTorch or Python, and how it is compiled and loaded."""
