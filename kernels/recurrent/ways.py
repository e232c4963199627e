"""Which of two ways prompts of delta rules go on CUDA. No torch here: plans of memory ask too."""

# True: as `delta_fused_cuda` has it, which no GPU has run yet. `bench.kernels.mixer_sweep` times
# both, and says which is the faster one.
FUSED = False
