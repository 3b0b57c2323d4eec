"""Tokenizers: bytes, Hugging Face, SentencePiece and tiktoken. Each file is read by its own library."""
