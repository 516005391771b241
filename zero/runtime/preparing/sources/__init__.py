"""Where documents come from: text files, JSON lines, TFRecords, Hugging Face datasets."""
