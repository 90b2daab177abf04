"""The engine ``megatron_core``: NVIDIA's Megatron-Core computes, the user's model keeps its names."""
