"""FreeToken for GGUF: mixture-of-experts models larger than the GPU, served as llama-server would."""

__version__ = "0.1.0"
