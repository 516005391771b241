"""`zero.corpus.Rows` for other libraries, a file for each: PyTorch, Grain, webdataset."""
