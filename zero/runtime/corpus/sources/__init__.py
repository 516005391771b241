"""Where documents come from: files, Hugging Face datasets, TFRecords."""
