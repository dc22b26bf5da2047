"""The host's side of the containers: which engine, GPU and image, one command in a container, the whole pipeline."""
