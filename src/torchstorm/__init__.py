"""torchstorm: name a memory budget and train as if you had more VRAM."""
