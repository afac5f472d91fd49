"""Policies as files for other programs, and the replay as data sets.

The names of the formats are here, without PyTorch.
"""

ONNX = "onnx"
TORCH_EXPORT = "torch.export"
POLICY = "policy"
MINARI = "minari"
POLICY_FILES = {ONNX: "policy.onnx", TORCH_EXPORT: "policy.pt2"}
"""The file of a policy that runs without this package, in each format."""
FORMATS = (*POLICY_FILES, POLICY, MINARI)
