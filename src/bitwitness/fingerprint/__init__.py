"""Tensor -> digest: what the replicas of a job exchange instead of their tensors, and what a checkpoint's label holds.

It stands below the guard because three different checks, the checkpoints and the wire between ranks all need the same
64-bit numbers, whatever device computed them. `reference` is the definition and proves what a digest guarantees;
`torch_ops` computes it with nothing but torch on any device; a kernel for one kind of device registers in `backends`.
"""

from bitwitness.fingerprint.backends import Tap, combine, fingerprint_tensors, tapped

__all__ = ["Tap", "combine", "fingerprint_tensors", "tapped"]
