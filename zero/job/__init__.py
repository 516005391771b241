"""From sections of the configuration to a model on devices, its optimizer and its programs."""
