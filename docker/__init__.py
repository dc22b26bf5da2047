"""The images and what runs in them: a Dockerfile, its locks, and the host's side of `nox -s bench-a100`.

Host's side, standard library only: `engine` finds Docker or Podman, `host` the GPU, `image` builds, `container` runs.
In the image: `entry` looks at the GPU before anything else does.
"""
