"""The input of a quantized linear in one launch: transformed, scaled, rounded, with the columns that follow it."""
