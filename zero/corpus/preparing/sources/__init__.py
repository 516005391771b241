"""Sources of documents: text files, JSON lines, TFRecords, Hugging Face datasets."""
