"""The networks of `fx2relax demo`."""
