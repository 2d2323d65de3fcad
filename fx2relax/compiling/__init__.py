"""Programs compiled in a process of their own: TVM's compiler stays out of the user's.

`client` asks, `process` answers; `spelling` has what a graph looks like on the way, `messages` how
it gets there. What cannot be asked for is compiled in the user's process.
"""
