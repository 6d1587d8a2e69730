"""Number families, one file each; every module here registers `Format` values and named `QuantSpec`s."""
