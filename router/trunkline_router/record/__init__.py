"""What became of each request, and when: its record, the lines and counts made of it, and its status over HTTP. And how
often what costs something may be done for a client.
"""
