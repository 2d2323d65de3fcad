"""What converters write on kernels for the pipeline to read."""

#: A kernel's attribute: it copies its first argument to its one result, then changes the copy.
CHANGES = "fx2relax.changes"
#: The annotation of the loop that copies.
COPIES = "fx2relax.copies"
