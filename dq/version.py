"""The version of dq, apart so that `import dq` needs nothing else."""

VERSION = "0.1.0"
