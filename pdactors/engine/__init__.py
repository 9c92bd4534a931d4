"""The model side: load, step, sample. The home of torch and transformers."""
