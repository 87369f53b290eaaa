"""From tokens to text, as far as nothing that follows can change it."""
