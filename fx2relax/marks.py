"""What is written on kernels for later passes to read."""

#: A kernel's attribute: it copies its first argument to its one result, then changes the copy.
CHANGES = "fx2relax.changes"
#: The annotation of the loop that copies.
COPIES = "fx2relax.copies"
#: A kernel's attribute: the arguments in whose memory its result may lie, by their positions.
REPLACES = "fx2relax.replaces"
