"""What infra/ ships as images and as compose, built and started with podman and buildah: fed by parts of Debian, feeds nobody."""
