"""Reading and writing weights: Hugging Face folders, warm starts, averages."""
