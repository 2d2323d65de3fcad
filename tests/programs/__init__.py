"""Random programs of tensor operators, each a Python function that both sides run."""
