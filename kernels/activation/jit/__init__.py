"""Triton kernels. Importing a module of this folder needs triton; nothing here is imported before a kernel runs."""
