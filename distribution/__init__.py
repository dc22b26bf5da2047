"""What is published of this project: wheel and sdist, the kernel for Hugging Face's hub, the pages of the documents."""
