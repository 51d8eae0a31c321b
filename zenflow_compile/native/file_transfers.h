// Reads and writes of chunks of a file, with checksums: see runtime/nvme/state_file.py, whose twin this is.
#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include <fcntl.h>
#include <unistd.h>

namespace zenflow {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "crc32 reads words");

// A part of a file. No two jobs on it run at the same time.
struct FileChunk {
  int32_t file;
  int32_t direct;  // reads and writes bypass the page cache; memory, offset and size are whole pages
  int64_t offset;
  int64_t size;
  uint32_t checksum;  // of the last write
};

struct Transfer {
  FileChunk* chunk;
  unsigned char* memory;
  uint32_t checksum;  // of what was read
};

constexpr int64_t kOtherChecksum = -1;  // in place of an error number

constexpr int64_t kPieceBytes = 8 << 20;  // enough for a disk's full rate; a checksum finds most of them in the cache

using CrcTables = std::array<std::array<uint32_t, 256>, 16>;

// CRC-32 of IEEE 802.3, as zlib.crc32: sixteen bytes at a time ("slicing-by-16", Kounavis and Berry 2005).
constexpr CrcTables crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
    tables[0][byte] = crc;
  }
  for (size_t table = 1; table < 16; ++table) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[table - 1][byte];
      tables[table][byte] = (before >> 8) ^ tables[0][before & 255u];
    }
  }
  return tables;
}

inline uint32_t crc32(const unsigned char* bytes, int64_t count, uint32_t checksum) {
  static constexpr CrcTables kTables = crc_tables();
  uint32_t crc = ~checksum;
  for (; count >= 16; bytes += 16, count -= 16) {
    uint32_t words[4];
    __builtin_memcpy(words, bytes, 16);
    words[0] ^= crc;
    crc = 0;
    for (int word = 0; word < 4; ++word) {
      for (int byte = 0; byte < 4; ++byte) crc ^= kTables[15 - 4 * word - byte][(words[word] >> (8 * byte)) & 255u];
    }
  }
  for (; count > 0; ++bytes, --count) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 255u];
  return ~crc;
}

// Moves all bytes: one call may move a part of them. Returns 0 or an error number.
template <class Call>
inline int64_t move(Call call, int file, unsigned char* memory, int64_t count, int64_t offset) {
  while (count > 0) {
    const ssize_t moved = call(file, memory, (size_t)count, (off_t)offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;  // the file ends before the chunk does
    memory += moved, offset += moved, count -= moved;
  }
  return 0;
}

inline void drop_cached(const FileChunk& chunk) {
  posix_fadvise(chunk.file, (off_t)chunk.offset, (off_t)chunk.size, POSIX_FADV_DONTNEED);  // advice: errors do not matter
}

// Both return 0, an error number, or kOtherChecksum.

inline int64_t read_chunk(Transfer& transfer) {
  const FileChunk& chunk = *transfer.chunk;
  uint32_t checksum = 0;
  for (int64_t at = 0; at < chunk.size; at += kPieceBytes) {
    const int64_t count = chunk.size - at < kPieceBytes ? chunk.size - at : kPieceBytes;
    if (const int64_t error = move(pread, chunk.file, transfer.memory + at, count, chunk.offset + at)) return error;
    checksum = crc32(transfer.memory + at, count, checksum);
  }
  transfer.checksum = checksum;
  if (!chunk.direct) drop_cached(chunk);
  return checksum == chunk.checksum ? 0 : kOtherChecksum;
}

inline int64_t write_chunk(Transfer& transfer) {
  FileChunk& chunk = *transfer.chunk;
  uint32_t checksum = 0;
  for (int64_t at = 0; at < chunk.size; at += kPieceBytes) {
    const int64_t count = chunk.size - at < kPieceBytes ? chunk.size - at : kPieceBytes;
    // The checksum and the disk get the same bytes: no other job may change them until this one is settled.
    checksum = crc32(transfer.memory + at, count, checksum);
    if (const int64_t error = move(pwrite, chunk.file, transfer.memory + at, count, chunk.offset + at)) return error;
  }
  if (!chunk.direct) {
    if (fdatasync(chunk.file) != 0) return errno;  // a buffered write would hide an error of the disk
    drop_cached(chunk);
  }
  chunk.checksum = checksum;
  return 0;
}

}  // namespace zenflow
