"""The subcommands of `fx2relax`, one a module.

Their modules import neither PyTorch nor TVM: a command does, once it runs and needs them.
"""
