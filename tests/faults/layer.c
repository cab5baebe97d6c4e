// Stands between a process and the system's calls on files below one folder: counts or lists them, and at the n-th lets
// the call fail, writes half, or sends the process a signal. Loaded by LD_PRELOAD; tests/faults/server.py arms it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, RENAME = 16, OTHER = 32, CREATE = 64, REMOVE = 128 };
enum { COUNT, FAIL, FAIL_ON, SHORT, SIGNAL, SIGNAL_TWICE, LIST };

static char root[4096];
static int kinds, action, number, at, log_descriptor = -1;
static atomic_int *seen;  // shared with the process that forked this one, which reads it afterwards

void faults_share(void) {
  seen = mmap(NULL, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void faults_arm(const char *folder, int kinds_, int action_, int number_, int at_, int log_) {
  snprintf(root, sizeof root, "%s", folder);
  kinds = kinds_, action = action_, number = number_, at = at_, log_descriptor = log_;
  atomic_store(seen, 0);
}

int faults_seen(void) { return atomic_load(seen); }

static int below(const char *path) {
  char whole[8192];
  if (!root[0] || !path) return 0;
  if (path[0] != '/') {
    char here[4096];
    if (!getcwd(here, sizeof here)) return 0;
    snprintf(whole, sizeof whole, "%s/%s", here, path);
    path = whole;
  }
  size_t length = strlen(root);
  return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int absent(const char *path) {
  struct stat found;
  return lstat(path, &found) != 0;
}

static int path_of(int descriptor, char *path, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, size - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path);
}

// The path that a call of the -at family means.
static const char *resolved(int folder, const char *path, char *whole, size_t size) {
  char start[4096];
  if (!path || path[0] == '/' || folder == AT_FDCWD) return path;
  path_of(folder, start, sizeof start);
  snprintf(whole, size, "%s/%s", start, path);
  return whole;
}

// What is to become of a call: 0, or FAIL with errno set, or SHORT. Called for calls below the folder alone.
static int event_from(int kind, const char *call, const char *path, const char *from) {
  if (!(kinds & kind)) return 0;
  if (action == LIST) {
    char line[16400];
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\n", call, path, from);
    syscall(SYS_write, log_descriptor, line, length);
    return 0;
  }
  int n = atomic_fetch_add(seen, 1) + 1;
  int hit = action == FAIL_ON ? n >= at : action == SIGNAL_TWICE ? n == at || n == at + 1 : n == at;
  if (!hit || action == COUNT) return 0;
  if (log_descriptor >= 0) {
    char line[8400];
    int length = snprintf(line, sizeof line, "%d %s %s\n", n, call, path);
    syscall(SYS_write, log_descriptor, line, length);
  }
  if (action == SIGNAL || action == SIGNAL_TWICE) {
    kill(getpid(), number);
    return 0;
  }
  if (action == SHORT) return kind == READ || kind == WRITE ? SHORT : 0;
  errno = number;
  return FAIL;
}

#define NEXT(type, name, ...) \
  static type (*next)(__VA_ARGS__); \
  if (!next) next = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);

static int event(int kind, const char *call, const char *path) { return event_from(kind, call, path, ""); }

// A list says which calls make a file and which empty one.
static int event_open(int flags, const char *call, const char *path) {
  int kind = flags & (O_CREAT | O_WRONLY | O_RDWR) ? CREATE : OPEN;
  if (action == LIST) call = flags & O_CREAT && absent(path) ? "create" : flags & O_TRUNC ? "write" : "open";
  return event(kind, call, path);
}

static __attribute__((noinline)) int event_in_file(int kind, const char *call, int descriptor) {
  char path[4096];
  return path_of(descriptor, path, sizeof path) ? event(kind, call, path) : 0;
}

// Pipes and sockets first: Python's signal handlers write to one, on a stack that is too small for paths.
static int event_at(int kind, const char *call, int descriptor) {
  struct stat found;
  if (!root[0] || fstat(descriptor, &found) || S_ISFIFO(found.st_mode) || S_ISSOCK(found.st_mode)) return 0;
  return event_in_file(kind, call, descriptor);
}

#define OPENING(name) \
  int name(const char *path, int flags, ...) { \
    NEXT(int, name, const char *, int, ...) \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest); \
    if (below(path) && event_open(flags, #name, path)) return -1; \
    return next(path, flags, mode); \
  }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    NEXT(int, name, int, const char *, int, ...) \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest); \
    char whole[8192]; \
    const char *place = resolved(folder, path, whole, sizeof whole); \
    if (below(place) && event_open(flags, #name, place)) return -1; \
    return next(folder, path, flags, mode); \
  }
OPENING_AT(openat)
OPENING_AT(openat64)

#define FILE_OPENING(name) \
  FILE *name(const char *path, const char *mode) { \
    NEXT(FILE *, name, const char *, const char *) \
    int flags = mode[0] == 'r' ? 0 : O_WRONLY | O_CREAT | (mode[0] == 'w' ? O_TRUNC : 0); \
    if (below(path) && event_open(flags, #name, path)) return NULL; \
    return next(path, mode); \
  }
FILE_OPENING(fopen)
FILE_OPENING(fopen64)

#define MOVING(name, kind, data_type, more, names) \
  ssize_t name(int descriptor, data_type data, size_t size more) { \
    NEXT(ssize_t, name, int, data_type, size_t more) \
    int what = event_at(kind, #name, descriptor); \
    if (what == FAIL) return -1; \
    if (what == SHORT && size > 1) size = (size + 1) / 2; \
    return next(descriptor, data, size names); \
  }
#define COMMA ,
MOVING(read, READ, void *, , )
MOVING(pread, READ, void *, COMMA off_t place, COMMA place)
MOVING(pread64, READ, void *, COMMA off64_t place, COMMA place)
MOVING(write, WRITE, const void *, , )
MOVING(pwrite, WRITE, const void *, COMMA off_t place, COMMA place)
MOVING(pwrite64, WRITE, const void *, COMMA off64_t place, COMMA place)

ssize_t writev(int descriptor, const struct iovec *pieces, int count) {
  NEXT(ssize_t, writev, int, const struct iovec *, int)
  if (event_at(WRITE, "writev", descriptor) == FAIL) return -1;
  return next(descriptor, pieces, count);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
  NEXT(size_t, fwrite, const void *, size_t, size_t, FILE *)
  int what = event_at(WRITE, "fwrite", fileno(file));
  return what == FAIL ? 0 : next(data, size, count, file);
}

ssize_t sendfile(int to, int from, off_t *place, size_t size) {
  NEXT(ssize_t, sendfile, int, int, off_t *, size_t)
  return event_at(WRITE, "sendfile", to) == FAIL ? -1 : next(to, from, place, size);
}

ssize_t sendfile64(int to, int from, off64_t *place, size_t size) {
  NEXT(ssize_t, sendfile64, int, int, off64_t *, size_t)
  return event_at(WRITE, "sendfile64", to) == FAIL ? -1 : next(to, from, place, size);
}

void *mmap(void *start, size_t size, int protection, int flags, int descriptor, off_t place) {
  NEXT(void *, mmap, void *, size_t, int, int, int, off_t)
  int kind = action == LIST && flags & MAP_SHARED && protection & PROT_WRITE ? WRITE : READ;
  if (descriptor >= 0 && event_at(kind, "mmap", descriptor) == FAIL) return MAP_FAILED;
  return next(start, size, protection, flags, descriptor, place);
}

#define ON_DESCRIPTOR(name, kind) \
  int name(int descriptor) { \
    NEXT(int, name, int) \
    return event_at(kind, #name, descriptor) == FAIL ? -1 : next(descriptor); \
  }
ON_DESCRIPTOR(fsync, SYNC)
ON_DESCRIPTOR(fdatasync, SYNC)

#define ON_TWO_PATHS(name, kind) \
  int name(const char *from, const char *to) { \
    NEXT(int, name, const char *, const char *) \
    return below(to) && event_from(kind, #name, to, from) == FAIL ? -1 : next(from, to); \
  }
ON_TWO_PATHS(rename, RENAME)
ON_TWO_PATHS(link, OTHER)
ON_TWO_PATHS(symlink, OTHER)

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
  NEXT(int, renameat, int, const char *, int, const char *)
  return below(to) && event_from(RENAME, "rename", to, from) == FAIL ? -1 : next(from_folder, from, to_folder, to);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
  NEXT(int, renameat2, int, const char *, int, const char *, unsigned)
  const char *call = flags & RENAME_EXCHANGE ? "exchange" : "rename";
  if (below(to) && event_from(RENAME, call, to, from) == FAIL) return -1;
  return next(from_folder, from, to_folder, to, flags);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
  NEXT(int, linkat, int, const char *, int, const char *, int)
  if (below(to) && event_from(OTHER, "link", to, from) == FAIL) return -1;
  return next(from_folder, from, to_folder, to, flags);
}

#define ON_PATH(name) \
  int name(const char *path) { \
    NEXT(int, name, const char *) \
    return below(path) && event(REMOVE, #name, path) == FAIL ? -1 : next(path); \
  }
ON_PATH(unlink)
ON_PATH(rmdir)

int unlinkat(int folder, const char *path, int flags) {
  NEXT(int, unlinkat, int, const char *, int)
  char whole[8192];
  const char *place = resolved(folder, path, whole, sizeof whole);
  return below(place) && event(REMOVE, "unlinkat", place) == FAIL ? -1 : next(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
  NEXT(int, mkdir, const char *, mode_t)
  if (below(path) && (action != LIST || absent(path)) && event(OTHER, "mkdir", path) == FAIL) return -1;
  return next(path, mode);
}

#define CUTTING(name, type) \
  int name(int descriptor, type size) { \
    NEXT(int, name, int, type) \
    return event_at(WRITE, #name, descriptor) == FAIL ? -1 : next(descriptor, size); \
  }
CUTTING(ftruncate, off_t)
CUTTING(ftruncate64, off64_t)
