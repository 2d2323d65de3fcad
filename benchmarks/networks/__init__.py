"""The networks: each function takes a batch size and gives a module with its arguments.

Sizes are those of the papers or of the published models; weights are random.
"""
