"""PyTorch's own operator samples (`op_db`) through ``torch.compile(..., backend="relax")``."""
