"""The families of models that are served: a module for each, with the keys of its config.json and its layers."""
