"""Original names of architectures, one file each; every module here registers a `Naming`."""
