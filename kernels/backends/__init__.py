"""Kernel backends: one file each, discovered; every one says where it can run and why not."""
