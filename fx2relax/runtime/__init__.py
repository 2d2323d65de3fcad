"""From a module to a callable: executables, library calls and the tensor boundary."""
