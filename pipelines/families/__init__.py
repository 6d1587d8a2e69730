"""Model families: one file of data each, discovered."""
