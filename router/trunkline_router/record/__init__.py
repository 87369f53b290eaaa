"""What became of each request, and when: records, and what is made of them."""
