"""The requests that run in a router or ended there lately, where their time went, and what a viewer may see of them."""
