"""What the tokens of a vocabulary stand for: their bytes and their largest width."""
