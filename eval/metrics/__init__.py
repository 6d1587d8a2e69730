"""Metrics: one file each, discovered; one that cannot run says why."""
