"""The requests that run in a router process or ended there lately, and where their time went."""
