"""Export of policies to files for other programs, and of replays to data sets.

This module only defines the formats, without importing PyTorch.
"""

ONNX = "onnx"
TORCH_EXPORT = "torch.export"
POLICY = "policy"
MINARI = "minari"
POLICY_FILES = {ONNX: "policy.onnx", TORCH_EXPORT: "policy.pt2"}
"""File name of a policy that runs without this package, by format."""
FORMATS = (*POLICY_FILES, POLICY, MINARI)
