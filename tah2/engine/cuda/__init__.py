"""Decoding on NVIDIA GPUs: attention over the pool in Triton kernels, passes replayed as CUDA graphs."""
