"""What the probes are called, and how they mark what they say."""

#: In the order in which they are tried.
STAGES = ("numpy", "torch", "tvm", "package", "native", "threads", "model", "disk")
#: Begins each line that is meant for the command.
MARK = "fx2relax-doctor:"
