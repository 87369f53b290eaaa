"""Programs that run where the clients are installed that cannot share an environment with the newest `openai`."""
