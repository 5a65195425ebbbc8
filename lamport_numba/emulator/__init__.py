"""The emulated device: the same PTX text, run on the CPU."""
